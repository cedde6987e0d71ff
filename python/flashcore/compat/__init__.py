"""Drop-ins with the interfaces of other attention packages."""
