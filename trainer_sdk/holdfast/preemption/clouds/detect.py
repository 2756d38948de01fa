"""This machine's cloud, as its firmware names it. No request is made to find out."""

from __future__ import annotations

from pathlib import Path

DMI = Path("/sys/class/dmi/id")

_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"  # on-premises Hyper-V has the same vendor, but not this


def detect_cloud(dmi: Path = DMI) -> str | None:
    """`aws`, `gcp`, `azure`, or None without a sign of them or without a firmware table."""
    vendor = _read(dmi, "sys_vendor")
    # Xen instances of EC2 name Xen as their vendor.
    if vendor == "amazon ec2" or "amazon" in _read(dmi, "bios_version") or "amazon" in _read(dmi, "bios_vendor"):
        return "aws"
    if _read(dmi, "product_name") == "google compute engine":
        return "gcp"
    if vendor == "microsoft corporation" and _read(dmi, "chassis_asset_tag") == _AZURE_CHASSIS:
        return "azure"
    return None


def _read(dmi: Path, name: str) -> str:
    try:
        return (dmi / name).read_text(encoding="utf-8", errors="replace").strip().casefold()
    except OSError:
        return ""
