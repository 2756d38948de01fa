"""What S3 and GCS have in common: a bucket over HTTP."""
