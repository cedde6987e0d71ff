"""FlashCore inside other libraries. register() of a module enables it."""
