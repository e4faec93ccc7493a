"""Reliable test-time adaptation."""
