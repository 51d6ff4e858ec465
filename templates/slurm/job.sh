#!/bin/bash
# {{ name }}. sbatch --chdir makes the attempt's folder, on the shared disk, the working directory.
if [ ! -e open ]; then exit 0; fi # the submission was given up, or this is no shared disk
export PATH=/usr/local/bin:/usr/bin:/bin
trap '' HUP USR1 USR2 # of a user or a site: for the ranks
if [ -e ended ]; then exit "$(cat ended)"; fi
if [ -e node-0/stop.json ]; then exit 75; fi # a stop that came after the agents' end, before this new run
echo "$SLURM_JOB_ID" > number
rm -f head.json refused.json requeue # of an earlier run
if ! command -v srun >/dev/null; then . /etc/profile; fi
refuse() { # leaves the exit report of a job whose agents have not started
  words=$(printf %s "$1" | tr '\n"\\' "  /" | tr -d '\000-\037' | cut -c 1-600)
  echo '{"state": "failed", "reason": "error", "error": {"rank": null, "kind": "config", "message": "'"$words"'"}, "ended_s": '"$(date +%s)"'}' > node-0/exit.json
  exit "$2"
}
{% include "slurm/modules.sh" %}
{% if container != "none" %}
cd {{ folder | sh }} || exit 64 # by its name in the order, without resolved links: the container has this path
{% endif %}
{% if container == "apptainer" %}
if ! command -v apptainer >/dev/null; then refuse "apptainer is not in the PATH of $(hostname): see slurm.modules" 64; fi
{% endif %}
# scancel, pre-emption and node failure send TERM to this shell too, which waits for the agents' answer.
trap '' TERM
srun --export=ALL --cpu-bind=none --kill-on-bad-exit=0 --wait=0{{ " --no-kill" if can_shrink else "" }} --output=task-%n.log --open-mode=append \
{% for option in step_options %}
  {{ option | sh }} \
{% endfor %}
{% if container == "pyxis" %}
  --container-image={{ image | sh }} --no-container-mount-home --container-workdir="$PWD" \
  --container-mounts={% for path in mounts %}{{ path | sh }}:{{ path | sh }}{{ "" if loop.last else "," }}{% endfor %} \
{% elif container == "apptainer" %}
  apptainer exec {{ "--nv " if gpus else "" }}{% for path in mounts %}--bind {{ path | sh }} {% endfor %}--pwd "$PWD" {{ image | sh }} \
{% endif %}
  {{ python | sh }} -I -c {{ start | sh }} "$PWD/package" "$PWD/order.json"{{ " " ~ interface | sh if interface else "" }} &
step=$!
wait $step
while kill -0 $step 2>/dev/null; do wait $step; done
wait $step
code=$?
if [ -e ended ]; then exit "$(cat ended)"; fi # srun's code is that of any node, also of a node that was given up
if [ -e head.json ]; then
  rm -f early
elif [ "$code" = 143 ] && echo early >> early && [ "$(wc -l < early)" -le 5 ]; then
  touch requeue # TERM: a pre-emption before the agents' start, at most 5 times in a row
elif [ "$code" != 0 ] && [ ! -e refused.json ]; then
  refuse "no agent has started on $(hostname): $(tail -qn 2 task-*.log batch.log | grep -v 'support for cpu binding')" "$code"
fi
# A job that saves and leaves in the grace of a pre-emption is FAILED for Slurm, and is not requeued by Slurm.
# After scancel the state is COMPLETING, and the job must not run again.
if [ -e requeue ] && rm requeue; then
  for pause in 5 10 20 40 80 160 0; do
    if [ -e node-0/stop.json ]; then exit 75; fi
    state=$(squeue -h -j "$SLURM_JOB_ID" -o %T) && break
    sleep $pause
  done
  if [ "$state" = RUNNING ] && scontrol requeue "$SLURM_JOB_ID"; then sleep 60; fi
fi
exit $code
