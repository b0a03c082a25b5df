"""Run every measurement in turn."""

from __future__ import annotations

from bench import chunk_key, control_plane

if __name__ == "__main__":
    chunk_key.main()
    control_plane.main()
