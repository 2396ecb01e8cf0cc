"""Training a drafter against a frozen target."""
