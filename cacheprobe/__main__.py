"""`python -m cacheprobe` is the command `cacheprobe`."""

from cacheprobe.cli.app import main

if __name__ == "__main__":
    main()
