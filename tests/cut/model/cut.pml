/*
 * The protocol between ranks and planner, small enough to look at every interleaving.
 *
 * Three ranks, two groups that share rank 1, and messages from rank 2 to rank 0:
 *
 *     key LEFT    collectives of ranks 0 and 1
 *     key RIGHT   collectives of ranks 1 and 2
 *     key SEND    rank 2's sends, key RECV rank 0's receives of the same channel
 *
 * Each rank issues its two operations in either order, twice, with a step boundary after each round, and waits for an
 * operation at once or for both at the end of the round. The orders that hang by themselves are left out.
 *
 * The request comes at any moment. An order lies in a box of its rank, where a newer one replaces it, for as long as the
 * scheduler likes; so does what a rank has to report, and what the planner knows of another rank may be older still. A gate
 * counts first and then looks; anything may come between. The planner loses patience at any moment.
 *
 * Checked: assertions (a stand is a cut, nobody moves in it), and that nothing hangs: an end state in which a process is
 * not at its end is an error. No process loops without a new report, so all that does not hang ends.
 *
 * check.py beside this runs it. -DORDER=n picks one program: bits 0 to 2 say which ranks issue their second operation
 * first, bit 3 that nobody waits before the end of a round. -DROUNDS=n is how often. -DCOUNTS_UNDER_ORDERS lets a gate
 * count before it looks also when it could know of an order. -DNEVER_RAISES, -DIGNORES_MESSAGES and
 * -DNEVER_TAKES_BACK put faults in that must be found.
 */

#define LEFT  0
#define RIGHT 1
#define SEND  2
#define RECV  3
#define KEYS  4
#define RANKS 3
#define NONE  7
#ifndef ROUNDS
#define ROUNDS 2
#endif

#define FREE 0
#define STEP 1
#define GATE 2

/* states of a rank */
#define RUNS     0
#define HELD     1
#define BOUNDARY 2
#define ENDED    3

/* verdicts */
#define PENDING   0
#define STAND     1
#define WITHDRAWN 2

#define AT(rank, key) ((rank) * KEYS + (key))

byte count[RANKS * KEYS];   /* what the gates count */
byte issued[RANKS * KEYS];  /* what was really issued */
byte state[RANKS];
byte at[RANKS];             /* the key that a held rank is held at */
bit  fresh[RANKS];          /* something to report */

/* the active order of each rank */
byte level[RANKS];
byte target[RANKS * KEYS];

/* orders on their way */
bit  order_there[RANKS];
byte order_level[RANKS];
byte order_target[RANKS * KEYS];

byte verdict = PENDING;
bit  released;
bit  is_async;
bit  second_first[RANKS];   /* which of its two operations a rank issues first */

inline member(rank, key, answer) {
	answer = ((rank == 0 && (key == LEFT || key == RECV)) ||
		(rank == 1 && (key == LEFT || key == RIGHT)) ||
		(rank == 2 && (key == RIGHT || key == SEND)))
}

#define HOLDS(rank, key) \
	(level[rank] >= GATE && count[AT(rank, key)] + 1 > target[AT(rank, key)])

#define MET(rank) \
	(count[AT(rank, 0)] >= target[AT(rank, 0)] && count[AT(rank, 1)] >= target[AT(rank, 1)] && \
	count[AT(rank, 2)] >= target[AT(rank, 2)] && count[AT(rank, 3)] >= target[AT(rank, 3)])

#define COMPLETE(key, n) \
	((key == LEFT && issued[AT(0, LEFT)] >= n && issued[AT(1, LEFT)] >= n) || \
	(key == RIGHT && issued[AT(1, RIGHT)] >= n && issued[AT(2, RIGHT)] >= n) || \
	((key == SEND || key == RECV) && issued[AT(2, SEND)] >= n && issued[AT(0, RECV)] >= n))

#ifdef COUNTS_UNDER_ORDERS
#define HASTY(rank) 1
#else
#define HASTY(rank) (level[rank] == FREE)
#endif

#define PASSES(rank, key) \
	(level[rank] < GATE || count[AT(rank, key)] <= target[AT(rank, key)])

#define STAND_AT(rank, key) state[rank] = HELD; at[rank] = key; fresh[rank] = 1

/* Issue an operation on `key`: count, look, perhaps stand. */
inline issue(key) {
	if
	:: atomic { HASTY(me) -> count[AT(me, key)]++; fresh[me] = level[me] > FREE };
		/* here an order may come, and the planner see what is held after all */
		if
		:: atomic { PASSES(me, key) -> issued[AT(me, key)]++ }
		:: atomic { !PASSES(me, key) ->
#ifndef NEVER_TAKES_BACK
			count[AT(me, key)]--;
#endif
			STAND_AT(me, key) };
			state[me] == RUNS
		fi
	:: atomic { !HASTY(me) && !HOLDS(me, key) ->
			count[AT(me, key)]++; issued[AT(me, key)]++; fresh[me] = 1 }
	:: atomic { !HASTY(me) && HOLDS(me, key) -> STAND_AT(me, key) };
		state[me] == RUNS
	fi
}

proctype Program(byte me) {
	byte round, first, second;
	atomic {
		first = (me == 0 -> LEFT : (me == 1 -> LEFT : RIGHT));
		second = (me == 0 -> RECV : (me == 1 -> RIGHT : SEND));
		if
		:: second_first[me] -> round = first; first = second; second = round; round = 0
		:: else
		fi
	}
	do
	:: round < ROUNDS ->
		issue(first);
		if
		:: is_async
		:: else -> COMPLETE(first, round + 1)
		fi;
		issue(second);
		COMPLETE(first, round + 1) && COMPLETE(second, round + 1);
		round++;
		if
		:: atomic { level[me] >= STEP && MET(me) -> state[me] = BOUNDARY; fresh[me] = 1 }
		   state[me] == RUNS
		:: !(level[me] >= STEP && MET(me))
		fi
	:: else -> break
	od;
	atomic { state[me] = ENDED; fresh[me] = level[me] > FREE }
}

/* A rank's native thread: takes orders, lets go whoever need not stand, answers, reports. */
proctype Control(byte me) {
	do
	:: atomic { order_there[me] ->
		order_there[me] = 0;
		level[me] = order_level[me];
		target[AT(me, 0)] = order_target[AT(me, 0)];
		target[AT(me, 1)] = order_target[AT(me, 1)];
		target[AT(me, 2)] = order_target[AT(me, 2)];
		target[AT(me, 3)] = order_target[AT(me, 3)];
		order_level[me] = 0;
		order_target[AT(me, 0)] = 0;
		order_target[AT(me, 1)] = 0;
		order_target[AT(me, 2)] = 0;
		order_target[AT(me, 3)] = 0;
		if
		:: state[me] == HELD && !HOLDS(me, at[me]) ->
			count[AT(me, at[me])]++;
			issued[AT(me, at[me])]++;
			state[me] = RUNS;
			at[me] = 0
		:: state[me] == BOUNDARY && !(level[me] >= STEP && MET(me)) -> state[me] = RUNS
		:: else
		fi;
		fresh[me] = level[me] > FREE
	}
	:: atomic { released && !order_there[me] && level[me] == FREE -> break }
	od
}

/* -- the planner ------------------------------------------------------------------------- */

byte known[RANKS * KEYS];
byte known_state[RANKS];
byte known_at[RANKS];
bit  answered[RANKS];       /* the last report is about the last order */
bit  heard[RANKS];
byte aim[KEYS];             /* targets by key; never fall */
byte sent_level[RANKS];
byte sent_aim[RANKS * KEYS];
byte plan_level = STEP;
bit  final;
bit  spoilt;

inline lift(key, value) {
	if
	:: value > aim[key] ->
		aim[key] = value;
		moved = 1;
#ifndef IGNORES_MESSAGES
		if
		:: key == SEND && aim[RECV] < value -> aim[RECV] = value
		:: key == RECV && aim[SEND] < value -> aim[SEND] = value
		:: else
		fi
#endif
	:: else
	fi
}

/* What a rank lacks, as a bit a key. */
inline find_lacks(rank) {
	lacks = 0;
	k = 0;
	do
	:: k < KEYS ->
		member(rank, k, mine);
		if
		:: mine && known[AT(rank, k)] < aim[k] -> lacks = lacks | (1 << k)
		:: else
		fi;
		k++
	:: else -> break
	od
}

inline send_order(rank, new_level) {
	order_there[rank] = 1;
	answered[rank] = 0;
	sent_level[rank] = new_level;
	order_level[rank] = new_level;
	k = 0;
	do
	:: k < KEYS ->
		member(rank, k, mine);
		/* only what is still lacking is named, except in a final order */
		sent_aim[AT(rank, k)] = (mine && new_level > FREE &&
			(final || known[AT(rank, k)] < aim[k]) -> aim[k] : 0);
		order_target[AT(rank, k)] = sent_aim[AT(rank, k)];
		k++
	:: else -> break
	od
}

/* Raise targets until nothing changes, then send what has changed; see planner.py. */
inline decide() {
	d_step {
		/* maxima over the members */
		r = 0;
		do
		:: r < RANKS ->
			k = 0;
			do
			:: k < KEYS -> value = known[AT(r, k)]; lift(k, value); k++
			:: else -> break
			od;
			r++
		:: else -> break
		od;
		/* held ranks that lack something */
		moved = 1;
		do
		:: moved ->
			moved = 0;
			r = 0;
			do
			:: r < RANKS ->
				find_lacks(r);
				if
#ifndef NEVER_RAISES
				:: lacks && known_at[r] != NONE && answered[r] ->
					value = known[AT(r, known_at[r])] + 1;
					lift(known_at[r], value)
#endif
				:: else
				fi;
				r++
			:: else -> break
			od
		:: else -> break
		od;
		/* is it a stand? */
		all = 1;
		any_lacks = 0;
		r = 0;
		do
		:: r < RANKS ->
			find_lacks(r);
			if
			:: lacks -> any_lacks = 1
			:: else
			fi;
			if
			:: lacks || !answered[r] ||
				(known_state[r] != HELD && known_state[r] != BOUNDARY) -> all = 0
			:: else
			fi;
			r++
		:: else -> break
		od;
		if
		:: final && (any_lacks || spoilt) ->
			final = 0;
			spoilt = 0;
			plan_level = GATE;
			all = 0
		:: else
		fi;
		if
		:: all && final -> verdict = STAND
		:: all && !final ->
			final = 1;
			spoilt = 0;
			r = 0;
			do
			:: r < RANKS -> send_order(r, GATE); r++
			:: else -> break
			od
		:: else ->
			r = 0;
			do
			:: r < RANKS ->
				moved = 0;
				find_lacks(r);
				k = 0;
				do
				:: k < KEYS ->
					if
					:: (lacks & (1 << k)) && sent_aim[AT(r, k)] != aim[k] -> moved = 1
					:: else
					fi;
					k++
				:: else -> break
				od;
				value = (final -> GATE : plan_level);
				if
				:: heard[r] && (moved || sent_level[r] != value) -> send_order(r, value)
				:: else
				fi;
				r++
			:: else -> break
			od
		fi;
		r = 0; k = 0; moved = 0; lacks = 0; mine = 0; all = 0; any_lacks = 0; value = 0
	}
}

#define SPEAKS(rank) (fresh[rank] && level[rank] > FREE)

inline take_report(rank) {
	fresh[rank] = 0;
	heard[rank] = 1;
	k = 0;
	do
	:: k < KEYS ->
		if
		:: known[AT(rank, k)] != count[AT(rank, k)] ->
			known[AT(rank, k)] = count[AT(rank, k)];
			spoilt = spoilt || final
		:: else
		fi;
		k++
	:: else -> break
	od;
	known_state[rank] = state[rank];
	known_at[rank] = (state[rank] == HELD -> at[rank] : NONE);
	/* Ranks and planner compare serials for that; numbers that only grow would be states in vain. */
	answered[rank] = !order_there[rank];
	k = 0
}

inline send_all(new_level) {
	d_step {
		r = 0;
		do
		:: r < RANKS -> send_order(r, new_level); r++
		:: else -> break
		od;
		r = 0; k = 0; mine = 0
	}
}

inline judge() {
	if
	:: known_state[0] == ENDED || known_state[1] == ENDED || known_state[2] == ENDED ->
		verdict = WITHDRAWN
	:: else -> decide()
	fi
}

inline check_stand() {
	atomic {
		assert(count[AT(0, LEFT)] == count[AT(1, LEFT)]);
		assert(count[AT(1, RIGHT)] == count[AT(2, RIGHT)]);
		assert(count[AT(2, SEND)] == count[AT(0, RECV)]);
		r = 0;
		do
		:: r < RANKS ->
			assert(state[r] == HELD || state[r] == BOUNDARY);
			k = 0;
			do
			:: k < KEYS ->
				assert(count[AT(r, k)] == issued[AT(r, k)]);
				assert(count[AT(r, k)] == known[AT(r, k)]);
				k++
			:: else -> break
			od;
			r++
		:: else -> break
		od;
		r = 0; k = 0
	}
}

active proctype Planner() {
	byte r, k, value, lacks;
	bit moved, mine, all, any_lacks;

	/* Choose a program that does not hang by itself. */
	atomic {
#ifdef ORDER
		second_first[0] = ORDER & 1;
		second_first[1] = (ORDER >> 1) & 1;
		second_first[2] = (ORDER >> 2) & 1;
		is_async = (ORDER >> 3) & 1;
#else
		do
		:: r < RANKS ->
			if
			:: second_first[r] = 0
			:: second_first[r] = 1
			fi;
			r++
		:: else -> break
		od;
		if
		:: is_async = 1
		:: !(second_first[0] && !second_first[1] && !second_first[2]) &&
			!(!second_first[0] && second_first[1] && second_first[2]) -> is_async = 0
		fi;
#endif
		r = 0;
		known_at[0] = NONE; known_at[1] = NONE; known_at[2] = NONE;
		run Program(0); run Program(1); run Program(2);
		run Control(0); run Control(1); run Control(2);
	}
	send_all(STEP);
	do
	:: verdict != PENDING -> break
	:: atomic { verdict == PENDING && SPEAKS(0) -> take_report(0); judge() }
	:: atomic { verdict == PENDING && SPEAKS(1) -> take_report(1); judge() }
	:: atomic { verdict == PENDING && SPEAKS(2) -> take_report(2); judge() }
	:: atomic { verdict == PENDING && plan_level == STEP ->
		plan_level = GATE;
		final = 0;
		spoilt = 0;
		decide()
	}
	od;
	if
	:: verdict == STAND ->
		check_stand();
		/* whatever may still happen happens here */
		check_stand()
	:: else
	fi;
	atomic {
		send_all(FREE);
		/* What the planner knew is of no use any more, and would keep equal states apart. */
		r = 0;
		do
		:: r < RANKS * KEYS -> known[r] = 0; sent_aim[r] = 0; r++
		:: else -> break
		od;
		r = 0;
		do
		:: r < RANKS ->
			known_state[r] = 0; known_at[r] = 0; answered[r] = 0; heard[r] = 0;
			sent_level[r] = 0; aim[r] = 0; fresh[r] = 0;
			r++
		:: else -> break
		od;
		aim[3] = 0; final = 0; spoilt = 0; plan_level = FREE; verdict = STAND; r = 0;
		released = 1
	}
}
