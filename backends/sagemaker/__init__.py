"""Amazon SageMaker training jobs."""

from cloudtrain.launcher.backend_table import BackendTraits

TRAITS = BackendTraits(
    block="cloudtrain.backends.sagemaker.block.SageMaker",
    help="Amazon SageMaker.",
    example={"region": "eu-west-1", "bucket": "my-bucket"},
    foreign_keys={"role": "role_arn iam_role iam_role_name execution_role RoleArn"},
    siblings={"region": "location", "bucket": "staging_bucket"},
    aliases=("aws", "amazon"),
    queues=True,
    sizes_disks=True,
    data_place="the bucket",
    data_copy="aws s3 cp --recursive {path} s3://BUCKET/{name}/",
    data_usd=0.023,  # S3 Standard, us-east-1; list price of 2025
)
