"""The adaptive model: `adapt`, `load` and the object that they return. It knows no data set."""
