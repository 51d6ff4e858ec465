"""AWS as far as training needs it, on loopback: what is sent to it is executed.

In a test, take the fixture `aws` (doubles/fixtures.py) and call it with the real boto3 or the real `aws`:

    aws.bucket("b"); aws.client("s3").put_object(...)      # S3, STS, IAM, SSM are moto's
    subprocess.run(["aws", ...], env={**os.environ, **aws.environ})
    aws.settings(stop_grace_s=2, log_lag_s=3)              # settings.py
    aws.fault("CreateTrainingJob", "lost", count=1)        # faults.py
    aws.interrupt("job"); aws.wait("job"); aws.lines("job"); aws.journal("CreateTrainingJob")

By hand: `PYTHONPATH=tests .venv/bin/python -m doubles.aws` prints the URL for AWS_ENDPOINT_URL.

It encodes AWS's documentation and SDKs, not observed behaviour of the service; what is invented says so where it
stands.
"""
