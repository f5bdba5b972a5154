"""``python -m redis_stream_coord.cli`` is ``redis-stream-coord``."""

from . import main

if __name__ == "__main__":
    main()
