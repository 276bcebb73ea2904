"""A request, and the hints, claims, loads and saves that act on it."""
