"""`python -m autopar` is the same command line as `autopar`."""

from autopar.cli.main import main

if __name__ == "__main__":
    main()
