"""A bucket of a real S3 server as a file system of fsspec, `bucket3://bucket/folder`, by boto3.

s3fs pins a botocore of its own, which is not the one that the service has; so the tests cannot install it.
"""

from __future__ import annotations

from typing import Any

import boto3
from botocore.exceptions import ClientError
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class S3Folder(AbstractFileSystem):
    """Credentials and the endpoint come from the environment, as boto3 reads it. `sent`: the keys that were written."""

    protocol = "bucket3"
    cachable = False
    sent: list[str] = []  # noqa: RUF012 - of all instances
    fail_at = ""
    """The end of a key whose upload breaks off."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.s3 = boto3.client("s3", region_name="us-east-1")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        bucket, _, key = self._strip_protocol(path).partition("/")
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{key}/", Delimiter="/")
        found = [
            {"name": f"{bucket}/{each['Key']}", "size": each["Size"], "type": "file"}
            for page in pages
            for each in page.get("Contents", ())
        ]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        bucket, _, key = self._strip_protocol(path).partition("/")
        try:
            found = self.s3.head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            raise FileNotFoundError(path) from None
        return {"name": path, "size": found["ContentLength"], "type": "file"}

    def rm_file(self, path: str) -> None:
        bucket, _, key = self._strip_protocol(path).partition("/")
        self.s3.delete_object(Bucket=bucket, Key=key)

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **kwargs: Any) -> S3File:
        return S3File(self, path, mode, autocommit=autocommit)


class S3File(AbstractBufferedFile):
    """Written in parts. No object is there until the last one is, and the file is committed."""

    DEFAULT_BLOCK_SIZE = 5 * 1024**2

    def _initiate_upload(self) -> None:
        self.bucket, _, self.key = self.path.partition("/")
        self.parts: list[dict[str, Any]] = []
        started = self.fs.s3.create_multipart_upload(Bucket=self.bucket, Key=self.key)
        self.upload = {"Bucket": self.bucket, "Key": self.key, "UploadId": started["UploadId"]}

    def _upload_chunk(self, final: bool = False) -> bool:
        if S3Folder.fail_at and self.key.endswith(S3Folder.fail_at):
            raise ConnectionError("the connection broke off, and https://key:secret@s3.example/?X-Amz-Signature=abc")
        part = self.fs.s3.upload_part(PartNumber=len(self.parts) + 1, Body=self.buffer.getvalue(), **self.upload)
        self.parts.append({"PartNumber": len(self.parts) + 1, "ETag": part["ETag"]})
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        self.fs.s3.complete_multipart_upload(MultipartUpload={"Parts": self.parts}, **self.upload)
        S3Folder.sent.append(self.key)

    def discard(self) -> None:
        self.fs.s3.abort_multipart_upload(**self.upload)

    def _fetch_range(self, start: int, end: int) -> bytes:
        bucket, _, key = self.path.partition("/")
        answer = self.fs.s3.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        return bytes(answer["Body"].read())
