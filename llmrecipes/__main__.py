"""`python -m llmrecipes`: the program, where its folder is not on the PATH."""

from llmrecipes.cli.app import main

if __name__ == "__main__":
    main()
