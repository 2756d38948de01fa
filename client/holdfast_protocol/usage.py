"""The bytes of checkpoints, and their cost.

`GET  /v1/usage`                               -> Page[UsageView]   (projects)
`GET  /v1/projects/{project}/usage`            -> UsageView
`GET  /v1/projects/{project}/runs/{run}/usage` -> UsageView
`GET  /v1/projects/{project}/cost`             -> CostView
`GET  /v1/projects/{project}/runs/{run}/cost`  -> CostView
`POST /v1/projects/{project}/runs/{run}/cost/forecast`  ForecastCost -> CostForecast
`GET  /v1/projects/{project}/samples`            -> Page[ProjectSample]   (the newest first)
`GET  /v1/projects/{project}/runs/{run}/samples` -> Page[RunSample]
`GET  /v1/prices`                              -> PriceListView
`PUT  /v1/prices`                  PriceList   -> PriceListView   (If-Match)
"""

from __future__ import annotations

from datetime import date, datetime
from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from holdfast_protocol.base import Reply, Request, example
from holdfast_protocol.states import StoreRole, Tier

GIB = 2**30


class StoreBytes(Reply):
    """One storage class in one store. The first four add up to `stored_bytes`; `pinned_bytes` and `held_bytes` are
    parts of the committed and trashed ones, and overlap."""

    store: StoreRole | None = Field(description="null: a store that the service no longer has.")
    store_url: str
    store_kind: str = Field(examples=["s3"])
    storage_class: str | None = Field(description="null: the bucket's default, or a filesystem.")
    tier: Tier
    copies: int
    committed_bytes: int
    arriving_bytes: int
    trashed_bytes: int
    pending_collection_bytes: int
    stored_bytes: int
    pinned_bytes: int
    held_bytes: int


class UsageView(Reply):
    """Each figure stands alone; their descriptions say which add up."""

    project: str
    run: str | None
    at: datetime
    counted_until: datetime | None = Field(
        default=None,
        description="Changes of what bytes are kept for are in these figures until then; all copies are in "
        "`stored_bytes` as of `at`. null: the catalog was upgraded, and what is kept for what is still being counted.",
    )
    logical_bytes: int = Field(description="Bytes of the committed checkpoints' states in the trainer.")
    deduplicated_bytes: int = Field(
        description="Bytes that these checkpoints did not send, because the store had them."
    )
    stored_bytes: int = Field(
        description="Bytes of all copies: committed, arriving, trashed and pending collection together. Of a run: the "
        "copies of chunks that it uses, which other runs may use too."
    )
    committed_bytes: int = Field(description="Copies of chunks that a committed checkpoint needs.")
    arriving_bytes: int = Field(description="Copies in transfer, and copies that only an upload needs.")
    trashed_bytes: int = Field(description="Copies that only checkpoints in the trash need: a purge would free them.")
    pending_collection_bytes: int = Field(description="Copies that no checkpoint needs: the collector will free them.")
    pinned_bytes: int = Field(description="Part of committed and trashed: copies that a pinned checkpoint needs.")
    held_bytes: int = Field(description="Part of committed and trashed: copies that a held checkpoint needs.")
    orphaned_bytes: int | None = Field(
        description="Beside all of these: objects that no row knows, as the last sweep of each store left them: it "
        "deletes those that are old enough. null: no sweep yet, or a run."
    )
    swept_at: datetime | None = Field(description="When the oldest of these sweeps was.")
    stores: list[StoreBytes]


class Price(Request):
    store_kind: str = Field(min_length=1, max_length=20, examples=["s3"])
    storage_class: str | None = Field(default=None, max_length=40, description="null: the default class.")
    per_gib_month: float = Field(ge=0, le=1000, allow_inf_nan=False)


class PriceList(Request):
    """For storing alone: no requests, no reads, no transfer, no minimum storage time."""

    model_config = example(
        {
            "currency": "USD",
            "as_of": "2026-11-01",
            "source": "List prices without tax: Amazon S3 in us-east-1, first 50 TB "
            "(https://aws.amazon.com/s3/pricing/, March 2026), and Google Cloud Storage in "
            "us-central1 (https://cloud.google.com/storage/pricing, September 2026). A filesystem "
            "of your own costs nothing here; put its price in if you know it.",
            "prices": [{"store_kind": "s3", "storage_class": None, "per_gib_month": 0.023}],
        }
    )

    as_of: date
    source: str = Field(min_length=1, max_length=1000, description="Where the prices are from.")
    currency: str = Field(min_length=1, max_length=10, examples=["USD"])
    prices: list[Price] = Field(min_length=1, max_length=200)

    @model_validator(mode="after")
    def _each_once(self) -> PriceList:
        names = [(price.store_kind, price.storage_class) for price in self.prices]
        if len(set(names)) != len(names):
            raise ValueError("a store kind and storage class has two prices; leave one out")
        return self


DEFAULT_PRICES = PriceList(
    as_of=date(2026, 3, 1),
    source="List prices without tax: Amazon S3 in us-east-1, first 50 TB (https://aws.amazon.com/s3/pricing/, March "
    "2026), and Google Cloud Storage in us-central1 (https://cloud.google.com/storage/pricing, September 2026). A "
    "filesystem of your own costs nothing here; put its price in if you know it.",
    currency="USD",
    prices=[
        Price(store_kind="s3", per_gib_month=0.023),
        Price(store_kind="s3", storage_class="infrequent", per_gib_month=0.0125),
        Price(store_kind="s3", storage_class="rare", per_gib_month=0.004),
        Price(store_kind="s3", storage_class="archive", per_gib_month=0.0036),
        Price(store_kind="s3", storage_class="deep_archive", per_gib_month=0.00099),
        Price(store_kind="gcs", per_gib_month=0.02),
        Price(store_kind="posix", per_gib_month=0.0),
    ],
)


class PriceListView(Reply):
    prices: PriceList
    is_default: bool
    etag: str = Field(default="", description="The list's version; for If-Match.")
    updated_at: datetime | None
    updated_by: str | None


class CostLine(Reply):
    store: StoreRole | None
    store_kind: str
    storage_class: str | None
    stored_bytes: int
    per_gib_month: float | None = Field(description="null: the list has no price for it, and it is not counted.")
    per_month: float


class CostView(Reply):
    """The present cost of the storage a month."""

    project: str
    run: str | None
    at: datetime
    currency: str
    as_of: date
    per_month: float
    lines: list[CostLine]
    unpriced_bytes: int


class ForecastCost(Request):
    model_config = example({"retention": {"keep_within": "6h", "keep_within_daily": "7d"}})

    retention: dict[str, Any] | None = Field(
        default=None, description="A retention policy to try; null: the one in force, and without one nothing expires."
    )
    tiers: dict[str, Any] | None = Field(
        default=None, description="A tiers policy to try; null: the one in force, and without one all stays hot."
    )


class ForecastLine(Reply):
    store_kind: str
    storage_class: str | None
    checkpoints: int
    bytes: int
    per_gib_month: float | None = Field(description="null: the list has no price for it, and it is not counted.")
    per_month: float


class CostForecast(Reply):
    """A run's cost a month if it went on as before, under these policies."""

    project: str
    run: str
    retention: dict[str, Any] | None = Field(description="The rules that were counted with; null: nothing expires.")
    tiers: dict[str, Any] | None
    based_on_saves: int = Field(description="The number of newest saves that the forecast is based on.")
    save_interval_seconds: float
    bytes_per_save: int = Field(description="Bytes that each further save adds to the store.")
    shared_bytes: int = Field(description="Bytes that all of them share, stored once.")
    after_days: float = Field(description="Days from now that the forecast covers.")
    kept_checkpoints: int
    trashed_checkpoints: int = Field(description="Expired, and still in the trash.")
    lines: list[ForecastLine]
    currency: str
    as_of: date
    per_month: float
    grows_per_month: float = Field(description="The growth of each further month; 0: none.")
    unpriced_bytes: int = Field(
        default=0, description="Bytes that have no price, and are in neither `per_month` nor `grows_per_month`."
    )
    limits: list[str] = Field(description="What the forecast leaves out.")


class SampledEvery(StrEnum):
    HOUR = "hour"
    DAY = "day"


class _Sample(Reply):
    """A whole hour, or a day of such hours, in UTC. What is counted is told as it was at `taken_at`, after the end of
    the last hour in it. It is what was known then: steps that were lost later are not taken out of it."""

    since: datetime = Field(description="The begin of the hour or the day, in UTC.")
    taken_at: datetime = Field(description="When the last sample in it was taken.")
    hours: int = Field(description="How many samples are in it: 1 of an hour, 24 of a whole day.")
    missed_hours: int = Field(
        description="Hours before its samples that have none, since the sample before: the service was down, and what "
        "was then is not known."
    )
    committed_checkpoints: int
    logical_bytes: int = Field(description="Bytes of the committed checkpoints' states in the trainer.")
    goodput: float | None = Field(
        description="`productive_seconds / wall_seconds`; null: nothing ran, no step's time was known, or not all of a "
        "project's runs were sampled. Over several items divide the sums."
    )
    productive_seconds: float = Field(description="Of these hours, in steps that the runs still had at `taken_at`.")
    wall_seconds: float = Field(description="Of these hours, in which an attempt was open or awaited by one.")


class ProjectSample(_Sample):
    stored_bytes: int = Field(description="Bytes of all copies in all stores.")
    stores: dict[str, int] = Field(
        description="These by the role that the store had: `primary`, `second`, `cold`, or `detached`."
    )
    per_month: float = Field(description="What they cost a month, at the prices of that moment.")
    currency: str
    unpriced_bytes: int = Field(description="Bytes that had no price, and are not in `per_month`.")
    live_runs: int = Field(description="Runs whose newest attempt was open.")
    runs_without_restore_point: int = Field(
        description="Those of them that had no restore point; if not all were sampled, that had committed nothing."
    )
    restore_point_age_seconds: float | None = Field(
        description="The greatest age of a live run's restore point; of a day the greatest of its hours. null: no live "
        "run had one, or not all were sampled."
    )


class RunSample(_Sample):
    """A run has samples of the hours at whose end it had an open attempt."""

    last_step: int | None
    restore_point_step: int | None = Field(description="null: it had no restore point.")
    restore_point_age_seconds: float | None = Field(
        description="How long before `taken_at` its restore point was committed; of a day the greatest of its hours."
    )
