"""Foreign layouts end here: inside, names are ours and an id is an id."""
