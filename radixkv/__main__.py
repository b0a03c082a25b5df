"""``python -m radixkv``: the same as the ``radixkv`` command."""

from __future__ import annotations

from radixkv.cli.main import main

if __name__ == "__main__":
    main()
