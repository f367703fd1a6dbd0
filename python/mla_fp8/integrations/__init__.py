"""Entry points that serving engines load. Importable without any engine; each probes what it finds.

Installing this package changes nothing that runs: a backend is offered under a name of its own, and
FlashMLA's calls inside an engine are taken over only if the engine's own plugin list names us.
"""
