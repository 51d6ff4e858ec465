"""Azure ML as far as training needs it, on loopback under its real host names: what is sent to it is executed.

In a test, take the fixture `azure` (doubles/fixtures.py), and give `azure.environ` to any unmodified client: its
HTTPS_PROXY leads to the stand-in, which answers as login, ARM, the region's data plane, blob storage, Key Vault and the
price list, with certificates of its own.

    azure.apply(monkeypatch)                          # or subprocess.run([...], env={**os.environ, **azure.environ})
    azure.settings(queued_s=2, restart_logs="replace")              # settings.py
    azure.fault("jobs.put", "lost", count=1)                         # faults.py
    azure.preempt("job"); azure.wait("job"); azure.log("job"); azure.journal("blob.get")

By hand: `PYTHONPATH=tests .venv/bin/python -m doubles.azure` prints its address and the certificate's file.

It encodes Azure's documentation and SDKs, not observed behaviour of the service; what is invented says so where it
stands.
"""
