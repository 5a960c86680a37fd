"""What is read: files, stores and the Hub, as rows and documents."""
