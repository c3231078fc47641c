"""Settings of `conch serve`: one definition each, resolved to one typed object.

A definition (`Setting`) gives the flag, the environment variable, the TOML key, the keyword of
`conch.Server`, the help text, the line in docs/settings.md and the attribute of `Settings`. Used by
`conch.cli`, `conch.api` and `conch.server_options`.
"""
