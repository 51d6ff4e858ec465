"""Object stores on the nodes: S3, Azure blobs, Cloud Storage, and folders, as mirrors of finished files."""
