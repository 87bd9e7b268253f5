"""What cannot work, found before any process starts."""
