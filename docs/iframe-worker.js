// The search of a site that is opened as files: browsers start no worker from a file, so the worker's script runs in
// a hidden frame. The theme's plugin `offline` names a script on unpkg.com for this, unless one is set (mkdocs.yml).
"use strict";

if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open();  // else Firefox replaces the frame's first document, and its functions with it
      inside.document.close();
      const load = (source) => new Promise((loaded, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, {src: source, onload: loaded, onerror: failed});
        inside.document.head.append(script);
      });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", {data}));
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.inside = inside;
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
  window.Worker = window.IFrameWorker;
}
