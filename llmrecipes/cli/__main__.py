"""`python -m llmrecipes.cli`."""

from llmrecipes.cli.app import main

if __name__ == "__main__":
    main()
