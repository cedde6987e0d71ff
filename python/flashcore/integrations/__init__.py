"""FlashCore inside other libraries. Nothing is registered until you call register()."""
