"""Foundation of the package: the C ABI, the loaded library, array adapters and prepared calls.

Nothing here imports a public module or an array framework. providers.PROVIDERS names the modules
that adapt a framework's arrays. They are imported when the first array of that framework arrives.
"""
