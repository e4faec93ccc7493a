"""What several methods share, each a declared part or a base class. No method is registered here."""
