"""Your own machines over ssh: no daemon, no root, the system's ssh."""

from cloudtrain.launcher.backend_table import BackendTraits

TRAITS = BackendTraits(
    block="cloudtrain.backends.ssh.block.Ssh",
    help="Your own machines.",
    example={"hosts": ["gpu1", "gpu2"]},
    foreign_keys={"hosts": "hosts hostfile host_list nodes_list", "ssh_config": "config_file ssh_config_file"},
    code_files=("requirements",),
    keeps_on_nodes=True,
    own_machines="ssh: {hosts: [gpu1, gpu2]}",
    programs={"ssh": "-V"},
    data_place="each host's work folder",
    data_copy="rsync -a {path} HOST:/data/",
)
