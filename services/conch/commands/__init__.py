"""The commands of ``conch`` besides ``conch serve``, a module each."""
