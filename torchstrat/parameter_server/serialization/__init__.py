"""How functions travel, and the captured objects that they reach: by value, by reference, or not at all."""
