"""Models made of others, written for others, and served: import, convert, upcycle, merge, finetune, export, serve."""
