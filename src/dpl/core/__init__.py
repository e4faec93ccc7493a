"""What every room may use: errors, settings, declared state, files. It knows no network and no method."""
