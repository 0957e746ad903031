from carmil.cli import main

main()
