"""A hash in Redis as the judge follows it: with every write, and with what stood there before the latest command."""

from __future__ import annotations


class Watched:
    """The fields of one hash.

    Attributes:
        fields: as they are now.
        old: as they were before the latest command, if that `touched` them.
    """

    __slots__ = ("fields", "old", "touched")

    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}
        self.old: dict[bytes, bytes] = {}
        self.touched = False

    def write(self, field: bytes, value: bytes | None) -> None:
        """A field was written, or removed."""
        if not self.touched:
            self.old, self.touched = dict(self.fields), True
        if value:
            self.fields[field] = value
        else:
            self.fields.pop(field, None)

    def clear(self) -> None:
        """The hash came or went as a whole."""
        for field in list(self.fields):
            self.write(field, None)
