"""The library in other people's trainers. Each module imports its host when it is imported itself."""
