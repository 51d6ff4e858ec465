"""Amazon SageMaker training jobs."""

from cloudtrain.launcher.backend_table import BackendTraits

TRAITS = BackendTraits(
    block="cloudtrain.backends.sagemaker.block.SageMaker",
    help="Amazon SageMaker.",
    example={"region": "eu-west-1", "bucket": "my-bucket"},
    foreign_keys={"role": "role_arn iam_role iam_role_name execution_role RoleArn"},
    siblings={"region": "location", "bucket": "staging_bucket"},
    aliases=("aws", "amazon"),
    sizes_disks=True,
)
