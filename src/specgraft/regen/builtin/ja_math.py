from __future__ import annotations

from .family import Family

FAMILIES: tuple[Family, ...] = ()
