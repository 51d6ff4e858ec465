"""The part of Azure ML that training needs, on loopback under Azure's host names: the stand-in executes the requests.

In a test, take the fixture `azure` (doubles/fixtures.py), and give any unmodified client `azure.environ`: its
HTTPS_PROXY is the stand-in, which answers as login, ARM, the region's data plane, blob storage, Key Vault and the price
list, with its own certificates.

    azure.apply(monkeypatch)                          # or subprocess.run([...], env={**os.environ, **azure.environ})
    azure.settings(token_s=2, restart_logs="replace")               # settings.py
    azure.fault("jobs.put", "lost", count=1)                         # faults.py
    azure.preempt("job"); azure.wait("job"); azure.log("job"); azure.journal("blob.get")

By hand: `PYTHONPATH=tests .venv/bin/python -m doubles.azure` prints its address and the certificate's file.

The stand-in encodes Azure's documentation and SDKs, not observed behaviour of the service; invented values are marked.
"""
