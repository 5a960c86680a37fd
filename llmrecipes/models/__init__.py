"""Models made of others, written for others, and served: import, convert, upcycle, grow, merge, finetune, export."""
