"""Stores of named objects: folders, S3, Azure blob storage, Cloud Storage."""
