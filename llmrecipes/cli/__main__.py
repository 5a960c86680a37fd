"""`python -m llmrecipes.cli`."""

from llmrecipes.cli.app import main

main()
