# Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
"""A store of packets on any file system that fsspec knows, content-addressed, checked, shared by processes."""

from kvspeed.packet.store.errors import (
    DamagedPacketError,
    MissingPacketError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from kvspeed.packet.store.recipe import Recipe
from kvspeed.packet.store.store import PacketStore

__all__ = [
    "DamagedPacketError",
    "MissingPacketError",
    "PacketStore",
    "Recipe",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
]
