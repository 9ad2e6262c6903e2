"""The run card as one HTML file and as markdown; `forensics/card` collects the facts."""
