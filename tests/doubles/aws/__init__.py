"""The part of AWS that training needs, on loopback: the stand-in executes the requests.

In a test, take the fixture `aws` (doubles/fixtures.py) and call it with the real boto3 or the real `aws`:

    aws.bucket("b"); aws.client("s3").put_object(...)      # S3, STS, IAM, SSM are moto's
    subprocess.run(["aws", ...], env={**os.environ, **aws.environ})
    aws.settings(stop_grace_s=2, log_lag_s=3)              # settings.py
    aws.fault("CreateTrainingJob", "lost", count=1)        # faults.py
    aws.interrupt("job"); aws.wait("job"); aws.lines("job"); aws.journal("CreateTrainingJob")

By hand: `PYTHONPATH=tests .venv/bin/python -m doubles.aws` prints the URL for AWS_ENDPOINT_URL in JSON.

The stand-in encodes AWS's documentation and SDKs, not observed behaviour of the service; invented values are marked.
"""
