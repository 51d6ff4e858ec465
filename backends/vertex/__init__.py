"""Google Vertex AI custom jobs."""
