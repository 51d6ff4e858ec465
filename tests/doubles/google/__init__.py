"""The part of Google Cloud that training on Vertex AI needs, on loopback under Google's host names.

The stand-in executes the requests. In a test, take the fixture `google` (doubles/fixtures.py), and give any unmodified
client `google.environ`: its HTTPS_PROXY is the stand-in, which answers as Vertex AI, Cloud Logging (both by gRPC and
REST), Cloud Storage, Secret Manager, the billing catalog and the OAuth endpoint, with its own certificates.

    google.apply(monkeypatch)                       # or subprocess.run([...], env={**os.environ, **google.environ})
    google.settings(cancelling_s=1, token_s=2)                      # settings.py
    google.fault("jobs.create", "lost", count=1)                     # faults.py
    google.preempt("job", "workerpool1-0"); google.wait("job"); google.log("job"); google.journal("storage.get")

By hand: `PYTHONPATH=tests .venv/bin/python -m doubles.google` prints its address, the certificate's file and more.

The stand-in encodes Google's documentation, clients and discovery documents, not observed behaviour of the service;
invented and assumed values are marked.
"""
