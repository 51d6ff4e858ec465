#!/bin/bash
# {{ name }}. sbatch --chdir makes the attempt's folder, on the shared disk, the working directory.
if [ ! -e open ]; then exit 0; fi # the submission was given up, or this is no shared disk
export PATH=/usr/local/bin:/usr/bin:/bin
if [ -e ended ]; then exit "$(cat ended)"; fi
echo "$SLURM_JOB_ID" > number
rm -f requeue # of an earlier run on a node that Slurm lost
if ! command -v srun >/dev/null; then . /etc/profile; fi
{% if modules %}
for start in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do if [ -r "$start" ]; then . "$start"; fi; done
{% for module in modules %}
module load {{ module | sh }} || exit 64
{% endfor %}
{% endif %}
{% if container == "apptainer" %}
if ! command -v apptainer >/dev/null; then echo "apptainer is not in the PATH of $(hostname)" >&2; exit 64; fi
{% endif %}
# scancel, pre-emption and node failure send TERM to this shell too, which waits for the agents' answer.
trap '' TERM
srun --export=ALL --cpu-bind=none --kill-on-bad-exit=0 --wait=0{{ " --no-kill" if can_shrink else "" }} --output=task-%n.log --open-mode=append \
{% for option in step_options %}
  {{ option | sh }} \
{% endfor %}
{% if container == "pyxis" %}
  --container-image={{ image | sh }} --container-mounts="${PWD%/*}:${PWD%/*}" --container-workdir="$PWD" --no-container-mount-home \
{% elif container == "apptainer" %}
  apptainer exec {{ "--nv " if gpus else "" }}--bind "${PWD%/*}" --pwd "$PWD" {{ image | sh }} \
{% endif %}
  {{ python | sh }} -I -c {{ start | sh }} "$PWD/package" "$PWD/order.json"{{ " " ~ interface | sh if interface else "" }} &
step=$!
wait $step
while kill -0 $step 2>/dev/null; do wait $step; done
wait $step
code=$?
if [ -e ended ]; then exit "$(cat ended)"; fi # srun's code is that of any node, also of a node that was given up
# A job that saves and leaves in the grace of a pre-emption is FAILED for Slurm, and is not requeued by Slurm.
if [ -e requeue ] && rm requeue && scontrol requeue "$SLURM_JOB_ID"; then sleep 60; fi
exit $code
