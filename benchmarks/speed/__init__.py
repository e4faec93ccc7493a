"""Speed and memory of every method against the floor, source inference and the usual way of writing it."""
