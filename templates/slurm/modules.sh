{% if modules %}
for start in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do if [ -r "$start" ]; then . "$start"; fi; done
# A site may set up `module`, or the folders of its modules, in files of its own.
if ! (module load{% for module in modules %} {{ module | sh }}{% endfor %}) >/dev/null 2>&1; then
  for start in /etc/profile.d/*.sh; do if [ -r "$start" ]; then . "$start"; fi; done
fi
{% for module in modules %}
module load {{ module | sh }} || refuse "module load "{{ module | sh }}" failed on $(hostname): see slurm.modules" 64
{% endfor %}
{% endif %}
