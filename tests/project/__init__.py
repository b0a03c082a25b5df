"""The project around the code: packaging, imports, links, the command line, what the documents quote."""
