/* The live parts of the page. The server renders all HTML; the log lines of a job are inserted as text only. */
(function () {
  "use strict";

  const MOST_LINES = 5000;
  const CURVES_MS = 1500; // the least time between two reads of the curves
  const AWAY_MS = 5000; // a page hidden for longer closes its connection
  const body = document.body;
  const one = (id) => document.getElementById(id);

  /* ---- parts rendered again by the server ---- */

  const waiting = new Map(); // parts received while the reader was selecting text in the part, or had a dialog open

  function show(name, html) {
    const place = one(`part-${name}`);
    if (!place) return;
    const chosen = document.getSelection();
    const isChosen = chosen && !chosen.isCollapsed && place.contains(chosen.anchorNode);
    if (isChosen || place.closest("dialog[open]")) {
      waiting.set(name, html);
      return;
    }
    waiting.delete(name);
    const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
    const ticked = new Set([...place.querySelectorAll("input[type=checkbox]:checked")].map((box) => box.id));
    const open = place.querySelector("details[open]") !== null, had = place.querySelector("details") !== null;
    place.innerHTML = html; // from our own templates: the templates escape foreign text
    for (const id of ticked) if (one(id)) one(id).checked = true;
    if (had) for (const each of place.querySelectorAll("details")) each.open = open;
    if (focused && one(focused)) one(focused).focus({preventScroll: true});
    localTimes(place);
    countTicked();
  }

  function showWaiting() {
    for (const [name, html] of [...waiting]) show(name, html);
  }

  document.addEventListener("selectionchange", showWaiting);
  for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("close", showWaiting);

  /* The server writes times in its own time zone; over ssh the reader's time zone may differ. */
  function localTimes(place) {
    for (const each of place.querySelectorAll("time[datetime]")) {
      const when = new Date(each.dateTime);
      if (!Number.isNaN(when.getTime())) each.textContent = stamp(when);
    }
  }

  const two = (number) => String(number).padStart(2, "0");
  const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

  function stamp(when) {
    const day = when.toDateString() === new Date().toDateString() ? "" : `${two(when.getDate())} ${MONTHS[when.getMonth()]} ${when.getFullYear()} `;
    return `${day}${two(when.getHours())}:${two(when.getMinutes())}:${two(when.getSeconds())}`;
  }

  function trouble(text) {
    const place = one("trouble");
    place.textContent = text;
    place.hidden = !text;
  }

  /* ---- the connection: one for each page, closed while the page is hidden ---- */

  let source = null, address = null, after = "", awayTimer = 0, on = {};

  function connect() {
    disconnect();
    if (!address) return;
    const url = new URL(address, location.href);
    if (after) url.searchParams.set("after", after);
    source = new EventSource(url);
    source.onopen = () => { one("link").textContent = ""; };
    source.onerror = () => {
      one("link").textContent = "not connected";
      // A refusal closes an EventSource permanently: the server was restarted, or has ended.
      if (source && source.readyState === EventSource.CLOSED) { const now = source; setTimeout(() => { if (source === now) connect(); }, 3000); whyNot(); }
    };
    for (const [kind, act] of Object.entries(on)) {
      source.addEventListener(kind, (event) => {
        if (event.lastEventId) after = event.lastEventId;
        act(JSON.parse(event.data));
      });
    }
  }

  /* Show the reason, which an EventSource does not report: a restarted server has a new address, printed on its terminal. */
  async function whyNot() {
    try {
      const answer = await fetch("/static/icon.svg", {cache: "no-store"});
      if (answer.status === 403) trouble(await answer.text());
    } catch (error) { /* no server: the page shows "not connected" */ }
  }

  /* Return the answer as an object; a refusal may be plain text. */
  async function wordsOf(answer) {
    const text = await answer.text();
    try { return JSON.parse(text); } catch (error) { return {error: text || answer.statusText}; }
  }

  function disconnect() {
    if (source) source.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(awayTimer);
    if (document.hidden) awayTimer = setTimeout(disconnect, AWAY_MS);
    else if (address && !source) connect();
  });
  window.addEventListener("pagehide", disconnect);
  window.addEventListener("pageshow", (event) => { if (event.persisted) connect(); });

  on.page = ({parts}) => { trouble(""); for (const [name, html] of Object.entries(parts)) show(name, html); newAttempt(); };
  on.trouble = ({text}) => trouble(text);
  on.logtrouble = ({text}) => { logTrouble = text; tell(); };
  on.curves = () => readCurves();

  /* ---- curves ---- */

  const curves = one("curves");
  let readingCurves = false, curvesDue = false, curvesAt = 0;

  async function readCurves() {
    if (!curves) return;
    if (readingCurves || document.hidden) { curvesDue = true; return; }
    const wait = curvesAt + CURVES_MS - performance.now();
    readingCurves = true;
    curvesDue = false;
    if (wait > 0) await new Promise((done) => setTimeout(done, wait));
    curvesAt = performance.now();
    try {
      const names = curves.dataset.jobs.split(" ").filter(Boolean);
      const datas = await Promise.all(names.map(async (name) => {
        const answer = await fetch(`/jobs/${encodeURIComponent(name)}/curves`, {headers: {accept: "application/json"}});
        const told = await wordsOf(answer);
        if (!answer.ok) throw new Error(told.error);
        return told;
      }));
      CloudtrainCharts.draw(curves, datas, {x: "step"});
      if (body.dataset.page === "compare" && datas.some((data) => data.job.exit_code === null)) setTimeout(readCurves, 5000);
    } catch (error) {
      if (!(error instanceof TypeError)) trouble(`The curves cannot be drawn: ${error.message}`); // else the server has ended, and the page shows that
    }
    readingCurves = false;
    if (curvesDue && !document.hidden) readCurves();
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden && curvesDue) readCurves(); });

  /* ---- a job's lines ---- */

  const log = one("log"), form = one("log-form"), state = one("log-state");
  let paused = [], isPaused = false, isOver = false, count = 0, logTrouble = "";
  const bars = new Map(); // for each rank the running progress bar

  function lineOf([rank, node, time, text, runs]) {
    const line = document.createElement("div");
    const when = document.createElement("time"), who = document.createElement("b");
    when.textContent = stamp(new Date(time * 1000));
    who.textContent = rank === null ? `node${node}` : `r${rank}`;
    who.className = rank === null ? "rn" : `r${rank % 8}`;
    if (rank === null) line.className = "ours";
    line.append(when, who, text);
    const key = `${node}/${rank}`, old = bars.get(key);
    if (old) old.remove();
    if (runs) bars.set(key, line); else bars.delete(key);
    return line;
  }

  /* A job may print faster than the browser can lay out: collect lines, for longer if the layout takes longer. */
  let queue = [], flushTimer = 0, pauseMs = 16;

  function add(lines) {
    if (isPaused) {
      paused = paused.concat(lines).slice(-MOST_LINES);
      tell();
      return;
    }
    queue = queue.concat(lines);
    if (queue.length > MOST_LINES) queue = queue.slice(-MOST_LINES);
    if (!flushTimer) flushTimer = setTimeout(flush, pauseMs);
  }

  function flush() {
    const began = performance.now(), follows = one("log-follow").checked, lines = queue;
    queue = [];
    flushTimer = 0;
    const batch = document.createDocumentFragment();
    for (const line of lines) batch.append(lineOf(line));
    const before = follows ? 0 : log.scrollHeight;
    const over = log.childElementCount + batch.childElementCount - MOST_LINES;
    if (over >= log.childElementCount) log.replaceChildren();
    else for (let number = 0; number < over; number++) log.firstElementChild.remove();
    const removed = follows ? 0 : before - log.scrollHeight;
    log.append(batch);
    if (follows) log.scrollTop = log.scrollHeight;
    else if (removed > 0) log.scrollTop -= removed; // the visible lines stay in place
    count = log.childElementCount;
    tell();
    pauseMs = Math.min(2000, Math.max(16, 4 * (performance.now() - began)));
  }

  function tell() {
    state.classList.toggle("over", Boolean(logTrouble));
    if (logTrouble) { state.textContent = logTrouble; return; }
    const more = isPaused && paused.length ? `, ${paused.length} more wait` : "";
    const what = isPaused ? "paused" : isOver ? "the end" : "live";
    state.textContent = count || more ? `${count === MOST_LINES ? "the last " : ""}${count} line${count === 1 ? "" : "s"}${more}; ${what}` : isOver ? "no lines" : "no lines yet";
  }

  function wanted() {
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (value.trim()) query.set(name, value.trim());
    return query;
  }

  function openLog() {
    const path = `/jobs/${encodeURIComponent(body.dataset.job)}`, query = wanted();
    one("log-download").href = `${path}/log?${query}`;
    if (!form.checkValidity()) return;
    after = logTrouble = "";
    address = `${path}/stream?${query}`;
    state.textContent = "reading";
    connect();
  }

  /* Follow a new attempt, unless the reader has chosen an earlier attempt. */
  function newAttempt() {
    if (!form) return;
    const rows = [...document.querySelectorAll("#part-attempts tbody td:first-child")];
    const choice = form.elements.attempt, last = Number(choice.options[0].value);
    const added = rows.map((cell) => Number(cell.textContent)).filter((number) => number > last).reverse();
    if (!added.length) return;
    const follows = Number(choice.value) === last;
    for (const number of added) choice.prepend(new Option(String(number), String(number)));
    if (follows) { choice.value = choice.options[0].value; openLog(); }
  }

  on.begin = () => {
    log.replaceChildren();
    bars.clear();
    paused = [];
    queue = [];
    count = 0;
    isOver = false;
    tell();
  };
  on.log = ({lines}) => add(lines);
  on.over = () => { isOver = true; tell(); };

  function setUpLog() {
    let timer = 0;
    form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(openLog, 350); });
    form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(timer); openLog(); });
    one("log-wrap").addEventListener("change", (event) => log.classList.toggle("wrapped", event.target.checked));
    one("log-times").addEventListener("change", (event) => log.classList.toggle("timed", event.target.checked));
    one("log-follow").addEventListener("change", (event) => { if (event.target.checked) log.scrollTop = log.scrollHeight; });
    one("log-pause").addEventListener("click", (event) => {
      isPaused = !isPaused;
      event.currentTarget.setAttribute("aria-pressed", String(isPaused));
      event.currentTarget.textContent = isPaused ? "Go on" : "Pause";
      if (!isPaused) { const lines = paused; paused = []; add(lines); }
      tell();
    });
    // Scrolling up stops following; scrolling to the end follows again.
    log.addEventListener("wheel", scrolled, {passive: true});
    log.addEventListener("touchmove", scrolled, {passive: true});
    log.addEventListener("keydown", scrolled);
    openLog();
  }

  function scrolled() {
    setTimeout(() => { one("log-follow").checked = log.scrollHeight - log.scrollTop - log.clientHeight < 24; }, 60);
  }

  /* ---- buttons ---- */

  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]");
    if (opener) one(opener.dataset.open).showModal();
    if (event.target.closest("[data-close]")) event.target.closest("dialog").close();
  });

  /* Send forms by fetch: under the policy `no-referrer` a browser sends a plain form with `Origin: null`. */
  document.addEventListener("submit", async (event) => {
    const form = event.target, then = form.dataset.then, dialog = form.closest("dialog");
    if (form.method !== "post") return;
    event.preventDefault();
    const fields = new URLSearchParams(new FormData(form, event.submitter));
    if (dialog) dialog.close(); else event.submitter.disabled = true;
    say("asking");
    try {
      const answer = await fetch(form.action, {
        method: "POST",
        body: fields,
        headers: {accept: "application/json", "x-cloudtrain-csrf": document.querySelector("meta[name=csrf]").content},
      });
      const told = await wordsOf(answer);
      if (answer.ok && then) { location.assign(then); return; }
      say(told.said || told.error, !answer.ok);
    } catch (error) {
      say(`That was not sent: ${error.message}`, true);
    }
    if (event.submitter) event.submitter.disabled = false; // the reader may try again
  });

  function say(words, isBad) {
    const place = one("said");
    place.textContent = words;
    place.classList.toggle("bad", Boolean(isBad));
    place.hidden = !words;
  }

  /* ---- the list ---- */

  function countTicked() {
    const button = document.querySelector(".compare");
    if (!button) return;
    const many = document.querySelectorAll("input[form=compare]:checked").length;
    button.disabled = many < 2 || many > 8;
    button.textContent = many > 1 ? `Compare ${many}` : "Compare";
  }

  document.addEventListener("change", (event) => {
    if (event.target.matches("input[form=compare]")) countTicked();
    if (event.target.matches(".filter[method=get] select") && event.target.form.requestSubmit) event.target.form.requestSubmit();
  });

  localTimes(document);
  const month = document.querySelector(".month[aria-current]"); // a year may be wider than the screen
  if (month) month.parentElement.scrollLeft = month.offsetLeft - month.parentElement.clientWidth / 2;
  if (body.dataset.stream) { address = body.dataset.stream; connect(); countTicked(); }
  if (body.dataset.page === "job") { setUpLog(); readCurves(); }
  if (body.dataset.page === "compare") readCurves();
}());
