"""What tests of several files build on, by subject."""
